"""Clients behind a trusted proxy are told apart by the address that it names; nobody else can choose an address."""

import asyncio
import logging
from ipaddress import ip_network

import grpc
import pytest

from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.options import QueueOptions, ServerLimits
from prelunet.evaluator.serving.proxies import TrustedProxies
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, new_channel, rpc_error, until
from tests.serving.serving_harness import GatedSession, eventually, png, running_server

KEY = "x-forwarded-for"
LOOPBACK = TrustedProxies(KEY, (ip_network("127.0.0.0/8"), ip_network("10.0.0.0/8"), ip_network("fd00::/8")))
ELSEWHERE = TrustedProxies(KEY, (ip_network("192.0.2.0/24"),))
REQUEST = pb.ClassifyRequest(model="fake", image=png(8, 8), protocol="center")


@pytest.mark.parametrize(
    ("peer", "values", "expected"),
    [
        ("ipv4:10.0.0.1:5", ["203.0.113.9"], "ipv4:203.0.113.9"),
        ("ipv4:10.0.0.1:5", ["198.51.100.1, 203.0.113.9"], "ipv4:203.0.113.9"),  # the first may be forged
        ("ipv4:10.0.0.1:5", ["198.51.100.1,203.0.113.9 , 10.0.0.2"], "ipv4:203.0.113.9"),
        ("ipv4:10.0.0.1:5", ["203.0.113.9", "10.0.0.2"], "ipv4:203.0.113.9"),  # a key may be repeated
        ("ipv4:10.0.0.1:5", ["10.0.0.3, 10.0.0.2"], "ipv4:10.0.0.3"),  # a client in the proxies' network
        ("ipv4:10.0.0.1:5", ["::ffff:203.0.113.9"], "ipv4:203.0.113.9"),
        ("ipv6:%5Bfd00::1%5D:5", ["2001:db8::9"], "ipv6:%5B2001:db8::9%5D"),
        ("ipv4:203.0.113.1:5", ["203.0.113.9"], "ipv4:203.0.113.1"),  # not a proxy
        ("ipv4:10.0.0.1:5", [], "ipv4:10.0.0.1"),
        ("ipv4:10.0.0.1:5", [""], "ipv4:10.0.0.1"),
        ("ipv4:10.0.0.1:5", ["unknown"], "ipv4:10.0.0.1"),
        ("ipv4:10.0.0.1:5", ["203.0.113.9, unknown, 10.0.0.2"], "ipv4:10.0.0.1"),
        ("unix:/run/x", ["203.0.113.9"], "unix"),
    ],
)
def test_the_last_address_that_is_not_a_trusted_proxys_counts(peer: str, values: list[str], expected: str) -> None:
    metadata = [("x-other", "192.0.2.1"), *((KEY, value) for value in values)]
    assert LOOPBACK.identity(metadata, peer) == expected


def from_(address: str) -> tuple[tuple[str, str], ...]:
    return ((KEY, address),)


@pytest.mark.parametrize(("proxies", "admitted"), [(LOOPBACK, True), (ELSEWHERE, False), (TrustedProxies(), False)])
@async_test
async def test_a_client_behind_a_trusted_proxy_has_its_own_share_of_the_calls(
    proxies: TrustedProxies, admitted: bool
) -> None:
    limits = ServerLimits(max_calls=4, proxies=proxies)
    with running_server(server_limits=limits, fake=FakeSession()) as server:
        async with new_channel(server.address) as proxy:
            stub = pb_grpc.PreluNetServiceStub(proxy)
            held = [stub.ClassifyStream(metadata=from_("203.0.113.1")) for _ in range(4)]
            await until(lambda: server.metric("prelunet_calls_now") == 4)
            assert (await rpc_error(stub.Classify(REQUEST, metadata=from_("203.0.113.1")))).code().name == (
                "RESOURCE_EXHAUSTED"
            )
            other = stub.Classify(REQUEST, metadata=from_("203.0.113.2"), timeout=30)
            if admitted:
                assert (await other).predictions
            else:
                assert (await rpc_error(other)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            for call in held:
                call.cancel()


@async_test
async def test_clients_on_one_connection_of_a_proxy_have_their_own_shares_of_the_queue() -> None:
    session, limits = GatedSession(), ServerLimits(proxies=LOOPBACK)
    with running_server(queue=QueueOptions(max_views=8), server_limits=limits, fake=session) as server:
        async with new_channel(server.address) as proxy:
            stub = pb_grpc.PreluNetServiceStub(proxy)

            def classify(client: str) -> grpc.aio.UnaryUnaryCall:
                return stub.Classify(REQUEST, metadata=from_(client), timeout=30)

            def waiting() -> float:
                return server.metric("prelunet_waiting_images", model="fake")

            greedy = [asyncio.ensure_future(classify("203.0.113.1")) for _ in range(8)]
            await until(lambda: waiting() == 8)
            assert (await rpc_error(classify("203.0.113.1"))).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            others = [asyncio.ensure_future(classify("203.0.113.2")) for _ in range(2)]
            await until(lambda: waiting() == 10)
            session.gate.set()
            assert all(answer.predictions for answer in await asyncio.gather(*greedy, *others))
            assert (await classify("203.0.113.2")).predictions
            assert waiting() == 0


def test_the_log_names_the_client_beside_the_peer_if_they_differ(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        running_server(server_limits=ServerLimits(proxies=LOOPBACK), fake=FakeSession()) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = pb_grpc.PreluNetServiceStub(channel)
        for metadata in (from_("203.0.113.1"), ()):
            stub.Classify(REQUEST, metadata=metadata, timeout=30)
        eventually(lambda: len(server.calls_logged(caplog)) == 2)
    first, second = server.calls_logged(caplog)
    assert first["peer"].startswith("ipv4:127.0.0.1:")
    assert first["client"] == "ipv4:203.0.113.1"
    assert "client" not in second
