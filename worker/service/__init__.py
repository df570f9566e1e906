"""The gRPC side of a replica: the Ray actor, the server, and the links to every router."""
