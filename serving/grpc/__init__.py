"""The gRPC side of serving: the published `vllm.grpc.engine.VllmEngine` service over an engine, and a client for it."""
