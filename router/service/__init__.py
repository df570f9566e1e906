"""The gRPC side of the router: asyncio, sockets and streams around the synchronous core."""
