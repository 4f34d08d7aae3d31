"""Repeat one fuzzing case.

    python -m benchmarks.reliability.fuzz.reproduce NUMBER [--seed N] [--server HOST:PORT] [--messages FOLDER]

Sends the case to the given server, or to one that it starts itself. Prints the result, the memory of the server and
whether it survived. --messages writes the bytes of the messages to FOLDER.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from benchmarks.reliability.cases import ServerTestBed
from benchmarks.reliability.fuzz.fuzz_cases import FuzzCase, case_of
from benchmarks.reliability.fuzz.fuzzing import call_case
from benchmarks.reliability.traffic.clients import new_channel


def main() -> int:
    """Send the case; return 1 if the server dies of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="number of the case")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run that the case is from")
    parser.add_argument("--server", help="HOST:PORT of a running server; default: start one")
    parser.add_argument("--messages", type=Path, help="folder for the bytes of the messages")
    options = parser.parse_args()
    case = case_of(options.seed, options.number)
    print(f"{case.method}, {case.what}, messages of {[len(message) for message in case.messages]} bytes")
    if options.messages is not None:
        options.messages.mkdir(parents=True, exist_ok=True)
        for place, message in enumerate(case.messages):
            (options.messages / f"{options.number}-{place}.bin").write_bytes(message)
    if options.server is not None:
        asyncio.run(_send(options.server, case))
        return 0
    with ServerTestBed(options.seed) as bed, bed.serve() as server:
        before = server.rss_mb()
        asyncio.run(_send(server.address, case))
        time.sleep(0.5)  # a dying process is not gone at once
        if server.is_alive():
            print(f"resident memory from {before:.0f} to {server.rss_mb():.0f} MB")
            return 0
        print(f"the server died: {server.wait()}")
        return 1


async def _send(address: str, case: FuzzCase) -> None:
    begun = time.monotonic()
    async with new_channel(address) as channel:
        status, inside = await call_case(channel, case)
    print(f"{status} {inside or ''} after {time.monotonic() - begun:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
