"""How a client's connection behaves."""

from prelunet.evaluator.serving.status import MAX_MESSAGE

PING_INTERVAL = 30  # seconds; a server cuts off who pings more often than `Limits.min_ping_interval` allows: 5 s
PING_TIMEOUT = 10  # seconds

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),  # a report of 1000 classes may pass gRPC's 4 MiB
    ("grpc.enable_http_proxy", 0),  # the address is meant as it stands; a proxy for downloads has no part in it
    # Calls go round all addresses of a name, as those of a headless Kubernetes service; gRPC would stay with the first.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # A machine that vanished during a call is noticed after these two, instead of never; an idle connection is silent.
    ("grpc.keepalive_time_ms", 1000 * PING_INTERVAL),
    ("grpc.keepalive_timeout_ms", 1000 * PING_TIMEOUT),
    ("grpc.http2.ping_timeout_ms", 1000 * PING_TIMEOUT),  # 60 s, where a connection still takes bytes
    ("grpc.http2.max_pings_without_data", 0),  # an image may wait and compute for longer than gRPC's two pings
    # gRPC connects anew after 1 s at the earliest, and until then refuses by itself what our retries try again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # a call that waits for a restart should not wait for this too
    ("grpc.use_local_subchannel_pool", 1),  # a server shares its time among connections, so each client has its own
)
