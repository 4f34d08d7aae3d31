# Two images of the server, without torch and onnx:
#   docker build -t prelunet:gpu .                # onnxruntime-gpu and CUDA 13's libraries; several GB
#   docker build -t prelunet:cpu --target cpu .   # onnxruntime
# Without TLS, for this machine only; models/ holds NAME/VERSION/model.onnx, as in models/demo/1/model.onnx:
#   docker run -p 127.0.0.1:50051:50051 -p 127.0.0.1:8000:8000 -p 127.0.0.1:9090:9090 -v "$PWD/models:/models:ro" \
#     --read-only prelunet:cpu --insecure --http-port 8000 --models /models
# On a GPU (NVIDIA's driver and container toolkit on the host). Without `--device cuda`, the server runs on the CPU if CUDA is
# unavailable, and its first log lines say so; with it, the server ends with exit code 5 instead:
#   docker run --gpus all … prelunet:gpu --device cuda …
# With TLS: docs/operations.md.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS sources
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY proto proto
COPY evaluator evaluator
COPY export export
COPY training training
RUN python -m venv /opt/prelunet

FROM sources AS build-cpu
RUN PIP_CONSTRAINT=constraints.txt /opt/prelunet/bin/pip install --no-cache-dir '.[cpu,otel]'

FROM sources AS build-gpu
RUN PIP_CONSTRAINT=constraints.txt /opt/prelunet/bin/pip install --no-cache-dir '.[gpu,otel]'

FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --no-create-home --uid 10001 prelunet
USER 10001:10001
# Defaults, which other variables replace. The health check reads the port of metrics here, so no flag should change it.
ENV PATH=/opt/prelunet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PRELUNET_SERVE_HOST=0.0.0.0 PRELUNET_SERVE_METRICS_PORT=9090
EXPOSE 50051 8000 9090
# GET /ready by bash itself: a Python that imports grpc would take half a second of CPU time at each check. Works with TLS, too.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/$PRELUNET_SERVE_METRICS_PORT && printf 'GET /ready HTTP/1.0\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["prelunet", "serve"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/prelunet /opt/prelunet

FROM runtime AS gpu
# What the container toolkit gives to the container.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/prelunet /opt/prelunet
