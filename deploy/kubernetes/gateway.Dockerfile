# docker build -f deploy/kubernetes/gateway.Dockerfile -t REGISTRY/widemesh-gateway:0.1.0 .
FROM python:3.12-slim
RUN pip install --no-cache-dir 'smg>=1.13,<2'
