"""Options of every gRPC channel that we open: plain values; the leaf need not import grpc."""

from __future__ import annotations

from typing import Any

from seams.limits import MESSAGE_BYTES_MAX

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),  # retries are ours: only we know what has arrived
    ("grpc.enable_http_proxy", 0),
    # A peer that hangs, or whose host vanished, is found out within 20 s of silence. gRPC's own
    # pings would wait a minute (ping_timeout) or be slowed to one a minute (max_pings).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)  # a broken one is no other stream's
