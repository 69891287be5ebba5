# Hocket on a CPU:  docker build -t hocket . && docker run -p 8000:8000 -v hocket:/data -v hocket-cache:/var/cache/hocket hocket --no-auth
# TORCH_INDEX chooses the torch build; by default PyTorch's own CPU one.
FROM python:3.12-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /venv
COPY constraints.txt ./
RUN /venv/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY engine engine
COPY static static
RUN /venv/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 hocket && install -d -o hocket /data /var/cache/hocket
COPY --from=build /venv /venv
USER hocket
ENV PATH=/venv/bin:$PATH HOCKET_HOST=0.0.0.0 HOCKET_DATA_DIR=/data HOCKET_CACHE_DIR=/var/cache/hocket
# --build-arg WARM=yes bakes in the default model and the kernels, compiled for a CPU like the builder's (another kind compiles at its first start).
ARG WARM=no
RUN if [ "$WARM" = yes ]; then hocket warmup --no-auth; fi
VOLUME ["/data", "/var/cache/hocket"]
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=5)"]
ENTRYPOINT ["hocket", "serve"]
