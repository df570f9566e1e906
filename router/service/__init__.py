"""The router's gRPC side: clients on one port, replicas on the other, one event loop for both."""
