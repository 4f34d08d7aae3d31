"""Make concurrent calls on one channel with tritonclient; print how many had which outcome, as JSON.

Arguments: HOST:PORT MODEL CALLS PICTURE
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tritonclient.grpc import aio  # type: ignore[import-untyped]


async def _main() -> None:
    address, model, calls, picture = sys.argv[1:]
    image = aio.InferInput("images", [1], "BYTES")
    image.set_data_from_numpy(np.array([Path(picture).read_bytes()], dtype=np.object_))
    async with aio.InferenceServerClient(address) as client:

        async def outcome() -> str:
            try:
                await client.infer(model, [image], parameters={"protocol": "center"})
            except aio.InferenceServerException as error:
                status = str(error.status()).removeprefix("StatusCode.")
                trailers = dict(error.__context__.trailing_metadata())  # of gRPC's own error
                retry = b"google.rpc.RetryInfo" in trailers.get("grpc-status-details-bin", b"")
                return status + ", retry later" * retry
            return "OK"

        print(json.dumps(Counter(await asyncio.gather(*(outcome() for _ in range(int(calls)))))))


if __name__ == "__main__":
    asyncio.run(_main())
