"""Starts, watches and stops a cluster on Ray: routers as processes, replicas as detached actors."""
