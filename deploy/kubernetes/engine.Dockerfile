# From the root of the checkout: docker build -f deploy/kubernetes/engine.Dockerfile -t REGISTRY/widemesh:0.1.0 .
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir '/src[cuda12]' && rm -rf /src
