# A small CPU image: the server, no torch, no onnx.
#   docker build -t prelunet .
# Without TLS, for this machine only:
#   docker run -p 127.0.0.1:50051:50051 -v "$PWD/demo/clothes:/models:ro" prelunet --insecure --model demo=/models/model.onnx
# For others, with tls.pem, tls.key and tokens.toml in a folder that user 10001 can read (the health check below does not use TLS):
#   docker run -p 50051:50051 -v "$PWD/demo/clothes:/models:ro" -v "$PWD/secrets:/secrets:ro" --no-healthcheck prelunet \
#     --tls-cert /secrets/tls.pem --tls-key /secrets/tls.key --token-file /secrets/tokens.toml --model demo=/models/model.onnx
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY proto proto
COPY evaluator evaluator
COPY export export
COPY training training
RUN python -m venv /opt/prelunet \
 && PIP_CONSTRAINT=constraints.txt /opt/prelunet/bin/pip install --no-cache-dir '.[cpu]'

FROM python:3.12-slim
COPY --from=build /opt/prelunet /opt/prelunet
RUN useradd --create-home --uid 10001 prelunet
USER prelunet
ENV PATH=/opt/prelunet/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 50051
# Asks grpc.health.v1 whether every model is loaded and warm.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import grpc; from grpc_health.v1 import health_pb2, health_pb2_grpc; channel = grpc.insecure_channel('127.0.0.1:50051'); assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2).status == 1"]
ENTRYPOINT ["prelunet", "serve", "--host", "0.0.0.0", "--port", "50051"]
