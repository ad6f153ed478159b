"""Fuzz target: any bytes are refused with DecodeError, or are the one form of a sample.

With atheris (``pip install atheris``), coverage-guided, until stopped or until a failure, which
libFuzzer writes to a file:

    python tests/serialize/fuzz_loads.py -max_len=4096 corpus/

Without it, a million seeded mutations of valid documents; ``--seed N`` starts elsewhere:

    python tests/serialize/fuzz_loads.py --rounds 1000000 --seed 0

The checksums of each input are put right first, so that the fuzzer gets past them.
"""

import argparse
import contextlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evenstep.serialize import DecodeError, Manifest, SampleSchema
from tests.serialize.test_hostile import (
    DATA,
    MANIFEST,
    MAX_NBYTES,
    SCHEMA,
    accepted_only_in_its_one_form,
    with_checksums,
)


def one_input(data: bytes) -> None:
    """Try ``data`` on every decoder."""
    accepted_only_in_its_one_form(with_checksums(data))
    with contextlib.suppress(DecodeError):
        assert SampleSchema.decode(data).encode() == data
    with contextlib.suppress(DecodeError):
        assert Manifest.decode(data, max_nbytes=MAX_NBYTES).encode() == data


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Return a seed with a few bytes overwritten, removed or repeated."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 1, 8, 32])
        match rng.randrange(3):
            case 0:
                data[place : place + length] = rng.randbytes(length)
            case 1:
                del data[place : place + length]
            case _:
                data[place:place] = data[place : place + length]
    return bytes(data)


def main() -> None:
    try:
        import atheris  # type: ignore[import-untyped]  # optional, and without types
    except ImportError:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--rounds", type=int, default=1_000_000)
        parser.add_argument("--seed", type=int, default=0)
        options = parser.parse_args()
        rng = random.Random(options.seed)
        seeds = [DATA, MANIFEST, SCHEMA.encode()]
        for _ in range(options.rounds):
            one_input(mutate(rng, seeds))
        print(f"{options.rounds} mutations: each refused, or the one form of a sample")
    else:
        atheris.instrument_all()
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
