# An image for one GPU node: CUDA 12 for A100s unless told otherwise.
#
#   docker build -t pointproj .
#   docker build -t pointproj --build-arg CUDA=13 --build-arg ARCH="9.0 10.0" .
#   docker run --gpus all pointproj backend=warp compile=true
#
# tests/image_steps.py runs these steps without Docker.

ARG CUDA=12

FROM nvidia/cuda:12.6.3-devel-ubuntu24.04 AS cuda12
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu126
# Warp's package on PyPI is for CUDA 13; its version is that of constraints.txt.
ARG WARP=https://github.com/NVIDIA/warp/releases/download/v1.19.0/warp_lang-1.19.0+cu12-py3-none-manylinux_2_28_x86_64.whl
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX \
    WARP=$WARP

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS cuda13
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX

# Compilers and toolkit stay in this stage; what it makes goes into the next.
# hadolint ignore=DL3006
FROM cuda${CUDA} AS build
ARG CUDA
ARG EXTRAS=train,rapids-cu${CUDA},tensorboard,sweep
ARG ARCH=8.0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch torchvision ${WARP:+"$WARP"}
COPY . ./
RUN pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]"
ENV TORCH_EXTENSIONS_DIR=/opt/extensions
RUN python -m pointproj build-native ${ARCH:+--arch ${ARCH}}

# torch brings the CUDA libraries; torch.compile needs a compiler and Python's headers.
FROM ubuntu:24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/extensions /opt/extensions
COPY --from=build /app /app
WORKDIR /app
# Whoever runs it (--user) may write here.
RUN install --directory --mode=1777 /app/data /app/outputs /cache
ARG COMMIT=unknown
ENV PATH=/opt/venv/bin:$PATH \
    TORCH_EXTENSIONS_DIR=/opt/extensions \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    HOME=/cache \
    USER=pointproj \
    POINTPROJ_COMMIT=$COMMIT \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME ["/app/data", "/app/outputs", "/cache"]
USER 1000:1000
HEALTHCHECK --interval=30m --timeout=3m --start-period=3m CMD ["python", "-m", "pointproj", "doctor", "backend=auto"]
ENTRYPOINT ["python", "train.py"]
