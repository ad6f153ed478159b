"""Bytes that are truncated, damaged or hostile: one typed error, and nothing else."""

import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.serialize import (
    DecodeError,
    FieldSpec,
    Manifest,
    NestedSample,
    SampleSchema,
    dumps,
    loads,
    pack,
)
from evenstep.serialize.checksum import payload_checksum
from evenstep.serialize.document import HEAD_NBYTES, Head
from tests.serialize.samples import nested_samples, same

ATTACKS = sorted((Path(__file__).parent / "attacks").glob("*.hex"))
MAX_NBYTES = 2**20

SCHEMA = SampleSchema((FieldSpec("ids", torch.int64, 2), FieldSpec("x", torch.bfloat16, 1)), ("n",))
SAMPLE: NestedSample = {
    "ids": torch.arange(80).reshape(2, 40),
    "nested": {"list": [1, -2.5, "text", b"bytes", (None, True)], "é": {}},
    "x": torch.ones(5, dtype=torch.bfloat16),
}
DATA = dumps(SAMPLE)
MANIFEST = pack([SAMPLE, {"x": torch.zeros(3)}, SAMPLE]).manifest.encode()


def decode_manifest(data: bytes) -> Manifest:
    return Manifest.decode(data, max_nbytes=MAX_NBYTES)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "loads": loads,
    "SampleSchema.decode": SampleSchema.decode,
    "Manifest.decode": decode_manifest,
}


class Attack(NamedTuple):
    target: str
    error: str
    data: bytes


def read_attack(path: Path) -> Attack:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# tries: "), "each attack says what it tries"
    told = dict(re.findall(r"^# (target|error): (.*)$", text, re.MULTILINE))
    return Attack(**told, data=bytes.fromhex(re.sub(r"#.*", "", text)))


@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: path.stem)
def test_each_attack_is_refused_for_its_reason(path: Path) -> None:
    attack = read_attack(path)
    with pytest.raises(DecodeError, match=attack.error):
        DECODERS[attack.target](attack.data)


CHILD = """
import resource, sys
from pathlib import Path
from evenstep.serialize import DecodeError, loads
from tests.serialize.test_hostile import ATTACKS, DECODERS, read_attack

attacks = [read_attack(path) for path in ATTACKS]
loads(bytes.fromhex(sys.argv[1]))  # what torch allocates at first use is not counted
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 32 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
refused = 0
for attack in attacks:
    try:
        DECODERS[attack.target](attack.data)
    except DecodeError:
        refused += 1
print(refused)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_attack_takes_memory() -> None:
    """All attacks run in a child that may allocate 32 MiB more than it has when it starts."""
    command = [sys.executable, "-c", CHILD, DATA.hex()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(ATTACKS) >= 75


def test_every_truncation_is_refused() -> None:
    for length in range(len(DATA)):
        with pytest.raises(DecodeError):
            loads(DATA[:length])
    for length in range(len(MANIFEST)):
        with pytest.raises(DecodeError):
            decode_manifest(MANIFEST[:length])
    schema = SCHEMA.encode()
    for length in range(len(schema)):
        with pytest.raises(DecodeError):
            SampleSchema.decode(schema[:length])


def test_every_extension_is_refused() -> None:
    for extra in (b"\0", b"\xff", b"\0" * 8, DATA):
        with pytest.raises(DecodeError):
            loads(DATA + extra)
        with pytest.raises(DecodeError):
            decode_manifest(MANIFEST + extra)
        with pytest.raises(DecodeError):
            SampleSchema.decode(SCHEMA.encode() + extra)


def test_every_flipped_bit_is_found() -> None:
    """Thousands of flips: each bit of the document, and of the manifest."""
    for data, decode in ((DATA, loads), (MANIFEST, decode_manifest)):
        for bit in range(len(data) * 8):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DecodeError):
                decode(bytes(damaged))


def test_random_damage_of_tensors_is_found() -> None:
    rng = random.Random(1)
    data = dumps({"x": torch.arange(20_000)})
    for _ in range(300):
        damaged = bytearray(data)
        start = rng.randrange(len(data))
        for place in range(start, min(len(data), start + rng.choice([1, 2, 9, 600]))):
            damaged[place] = rng.randrange(256)
        if damaged != data:
            with pytest.raises(DecodeError):
                loads(damaged)


def with_checksums(data: bytes) -> bytes:
    """Return ``data`` with the checksums that an attacker would put in."""
    fixed = bytearray(data)
    try:
        head = Head.parse(data)
    except DecodeError:
        return data
    if head.nbytes == len(data):
        payload = fixed[head.payload_start :]
        if payload:
            checksum = payload_checksum(torch.frombuffer(payload, dtype=torch.uint8))
            fixed[24:28] = checksum.to_bytes(4, "little")
        tree = zlib.crc32(fixed[HEAD_NBYTES : head.payload_start], zlib.crc32(fixed[:28]))
        fixed[28:32] = tree.to_bytes(4, "little")
    return bytes(fixed)


def accepted_only_in_its_one_form(data: bytes) -> None:
    """Check that ``data`` is refused, or is exactly what its sample is written as."""
    try:
        sample = loads(data)
    except DecodeError:
        return
    assert dumps(sample) == data


def test_every_flipped_bit_with_right_checksums_is_refused_or_another_sample() -> None:
    for bit in range((len(DATA)) * 8):
        damaged = bytearray(DATA)
        damaged[bit // 8] ^= 1 << bit % 8
        accepted_only_in_its_one_form(with_checksums(bytes(damaged)))


@given(nested_samples, st.data())
@settings(deadline=None)
def test_mutations_with_right_checksums_are_refused_or_another_sample(
    sample: NestedSample, choices: st.DataObject
) -> None:
    data = bytearray(dumps(sample))
    for _ in range(choices.draw(st.integers(1, 4))):
        place = choices.draw(st.integers(0, len(data) - 1))
        data[place] = choices.draw(st.sampled_from([0, 1, 7, 9, 10, 0x7F, 0x80, 0xFF]))
    accepted_only_in_its_one_form(with_checksums(bytes(data)))


@given(st.binary(max_size=80))
@settings(deadline=None)
def test_any_tree_is_refused_or_has_one_form(tree: bytes) -> None:
    template = bytearray(dumps({}))[:HEAD_NBYTES]
    template[12:16] = len(tree).to_bytes(4, "little")
    accepted_only_in_its_one_form(with_checksums(bytes(template) + tree + bytes(-len(tree) % 8)))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_one_schema(data: bytes) -> None:
    try:
        schema = SampleSchema.decode(data)
    except DecodeError:
        return
    assert schema.encode() == data


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_one_manifest(content: bytes) -> None:
    data = b"\1" + content
    data += zlib.crc32(data).to_bytes(4, "little")
    try:
        manifest = decode_manifest(data)
    except DecodeError:
        return
    assert manifest.encode() == data


@given(st.binary(max_size=30))
def test_any_bytes_are_refused_or_the_sizes_of_one_layout(data: bytes) -> None:
    try:
        layout = SCHEMA.decode_dims(data)
    except DecodeError:
        return
    assert layout.encode_dims() == data
    assert layout.nbytes < 2**62


def test_undamaged_bytes_are_accepted() -> None:
    assert same(loads(with_checksums(DATA)), SAMPLE)
    assert decode_manifest(MANIFEST).encode() == MANIFEST
