import pytest
import torch
from torch import Tensor

from vlm.layout import Batch, Images, images_of, images_per_sample
from vlm.model import (
    HEAD_DIM,
    WINDOW_PATCHES,
    ModelConfig,
    VisionEncoder,
    VisionLanguageModel,
    attend,
    rotary_angles,
    rotate,
    training_gflop,
    window_sizes,
)
from vlm.workload import Workload

CONFIG = ModelConfig(width=HEAD_DIM, depth=2)
WORKLOAD = Workload(seed=3, scale=512)


def model_for(config: ModelConfig = CONFIG) -> VisionLanguageModel:
    torch.manual_seed(0)
    return VisionLanguageModel(config)


def images(*grids: tuple[int, int, int]) -> Images:
    generator = torch.Generator().manual_seed(5)
    patches = sum(frames * rows * columns for frames, rows, columns in grids)
    return {
        "hidden_states": torch.randn(patches, 588, generator=generator),
        "grid_thw": torch.tensor(grids).reshape(-1, 3),
    }


def gradients(model: VisionLanguageModel, batches: list[Batch]) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in batches:
        model(batch).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def test_images_do_not_see_each_other() -> None:
    encoder = model_for().encoder
    pair = images((1, 4, 6), (1, 10, 12))
    together = encoder(pair)
    first: Images = {
        "hidden_states": pair["hidden_states"][:24],
        "grid_thw": pair["grid_thw"][:1],
    }
    torch.testing.assert_close(together[:6], encoder(first), rtol=1e-5, atol=1e-6)
    changed: Images = {
        "hidden_states": torch.cat([pair["hidden_states"][:24], torch.ones(120, 588)]),
        "grid_thw": pair["grid_thw"],
    }
    again = encoder(changed)
    torch.testing.assert_close(together[:6], again[:6], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together[6:], again[6:])


def test_the_last_block_sees_the_whole_image() -> None:
    encoder = model_for().encoder
    image = images((1, 10, 20))
    assert image["hidden_states"].shape[0] > 2 * WINDOW_PATCHES
    before = encoder(image)
    image["hidden_states"][-1] += 1.0
    assert not torch.equal(before[0], encoder(image)[0])


def test_windows_cover_an_image() -> None:
    assert window_sizes(150) == [64, 64, 22]
    assert window_sizes(64) == [64]
    assert window_sizes(4) == [4]


def test_packed_compute_equals_that_of_each_sample() -> None:
    model = model_for()
    packed = gradients(model, [WORKLOAD.micro_batch(range(6))])
    alone = gradients(model, [WORKLOAD.micro_batch(range(i, i + 1)) for i in range(6)])
    assert packed.keys() == alone.keys()
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_padding_takes_no_part() -> None:
    model = model_for()
    batch = WORKLOAD.micro_batch(range(4))
    before = model(batch).item()
    padding = ~batch["attention_mask"]
    batch["input_ids"][padding] = 100
    batch["labels"][padding] = 0
    batch["position_ids"][:, padding] = 77
    assert model(batch).item() == before


def test_the_language_model_is_causal() -> None:
    model = model_for()
    batch = WORKLOAD.micro_batch(range(1))
    batch["loss_mask"].zero_()
    batch["loss_mask"][0, 0] = 1.0
    before = model(batch).item()
    last = int(batch["attention_mask"].sum()) - 1
    batch["input_ids"][0, last] = 400
    assert model(batch).item() == before


def test_a_batch_without_images_still_gives_every_parameter_a_gradient() -> None:
    # Without one DistributedDataParallel would wait for the encoder's gradients forever.
    model = model_for()
    batches = (WORKLOAD.micro_batch(range(i, i + 1)) for i in range(100))
    text_only = next(batch for batch in batches if images_per_sample(batch).sum() == 0)
    assert len(images_of(text_only)["hidden_states"]) == 0
    found = gradients(model, [text_only])
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(not grad.any() for name, grad in found.items() if name.startswith("encoder"))


def test_attention_is_that_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 5, 2, HEAD_DIM, generator=generator)
    mixed = attend(q, k, v, [2, 3], causal=False)
    scores = torch.einsum("qhd,khd->hqk", q[2:], k[2:]) / HEAD_DIM**0.5
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v[2:])
    torch.testing.assert_close(mixed[2:], expected)
    causal = attend(q, k, v, [2, 3], causal=True)
    torch.testing.assert_close(causal[[0, 2]], v[[0, 2]])  # the first of a segment sees itself


def test_rotary_scores_depend_on_distances_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=generator)

    def score(q_at: list[int], k_at: list[int]) -> Tensor:
        at = [rotary_angles(torch.tensor(place)[:, None]) for place in (q_at, k_at)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    torch.testing.assert_close(score([5, 9], [2, 3]), score([15, 10], [12, 4]))
    assert not torch.allclose(score([5, 9], [2, 3]), score([5, 9], [3, 2]))
    torch.testing.assert_close(score([0, 0], [0, 0]), (q * k).sum())


def test_work_per_patch_and_token() -> None:
    width, depth = 128, 3
    model = model_for(ModelConfig(width=width, depth=depth))
    per_patch, per_token = training_gflop(model)
    block = 2 * 12 * width**2  # qkv 3, output 1, two layers of the MLP 4 each
    window = 4 * width * WINDOW_PATCHES
    merge = 2 * (4 * width) * (4 * width + width) / 4
    patch = depth * (block + window) + 2 * 588 * width + merge
    token = depth * block + 2 * width * model.embed.num_embeddings
    assert per_patch == pytest.approx(3 * patch / 1e9)
    assert per_token == pytest.approx(3 * token / 1e9)


def test_the_encoder_needs_no_image_at_all() -> None:
    assert VisionEncoder(CONFIG)(images()).shape == (0, HEAD_DIM)
