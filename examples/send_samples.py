"""Send samples to another process, through shared memory and through a socket, without pickle.

    python examples/send_samples.py

The parent packs two samples into a block of shared memory; the child reads them there without a
copy. Then the parent writes the same samples to a socket, one after the other.
"""

import argparse
import multiprocessing
import socket
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from evenstep.serialize import Manifest, NestedSample, PackedSamples, dump, load, pack


def make_samples() -> list[NestedSample]:
    return [
        {"ids": torch.arange(2), "vision": {"patches": torch.ones(6, 8)}, "path": "a.png"},
        {"ids": torch.arange(3), "vision": {"patches": torch.ones(0, 8)}, "path": None},
    ]


def send_through_shared_memory(samples: list[NestedSample], connection: Connection) -> None:
    """Pack into a shared block, send its name and the manifest, and wait for the answer."""
    block = SharedMemory(create=True, size=1 << 20)
    try:
        shared = torch.frombuffer(block.buf, dtype=torch.uint8)
        packed = pack(samples, out=shared)
        connection.send_bytes(block.name.encode())
        connection.send_bytes(packed.manifest.encode())
        print("shared memory:", connection.recv_bytes().decode())
        del shared, packed  # no tensor may point into the block when it is closed
    finally:
        block.close()
        block.unlink()


def receive_through_shared_memory(connection: Connection) -> None:
    block = SharedMemory(connection.recv_bytes().decode())
    manifest = Manifest.decode(connection.recv_bytes(), max_nbytes=block.size)
    buffer = torch.frombuffer(block.buf, dtype=torch.uint8, count=manifest.nbytes)
    received = PackedSamples(manifest, buffer)
    connection.send_bytes(describe([sample.nested() for sample in received]).encode())
    del buffer, received
    block.close()


def send_through_socket(samples: list[NestedSample], connection: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection.send_bytes(str(server.getsockname()[1]).encode())
        peer, _ = server.accept()
        with peer, peer.makefile("wb") as stream:
            for sample in samples:
                dump(sample, stream)
    print("socket:", connection.recv_bytes().decode())


def receive_through_socket(connection: Connection) -> None:
    port = int(connection.recv_bytes())
    received = []
    with socket.create_connection(("127.0.0.1", port)) as peer, peer.makefile("rb") as stream:
        while True:
            try:
                received.append(load(stream))
            except EOFError:
                break
    connection.send_bytes(describe(received).encode())


def describe(samples: list[NestedSample]) -> str:
    ids = [sample["ids"] for sample in samples]
    paths = [sample["path"] for sample in samples]
    return f"{paths} with {[tensor.tolist() for tensor in ids if isinstance(tensor, Tensor)]}"


def receive(connection: Connection) -> None:
    receive_through_shared_memory(connection)
    receive_through_socket(connection)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs,), daemon=True)
    child.start()
    theirs.close()  # so that reading fails, rather than waits, if the child dies
    samples = make_samples()
    send_through_shared_memory(samples, ours)
    send_through_socket(samples, ours)
    child.join()
    if child.exitcode:
        raise SystemExit(f"the receiving process ended with exit code {child.exitcode}")


if __name__ == "__main__":
    main()
