# An image for one GPU node: packages of CUDA 12, whose driver every A100 node has, unless told otherwise.
#
#   docker build -t pointproj .
#   docker build -t pointproj --build-arg CUDA=13 --build-arg CONSTRAINTS=constraints.txt .
#   docker run --gpus all pointproj backend=warp compile=true
#
# tools/image_steps.py runs these steps without Docker.

# The library of native, from these sources: CUDA 12.4, whose code runs beside a torch for CUDA 12 or 13.
FROM nvidia/cuda:12.4.1-devel-ubuntu22.04 AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.11 -m venv /opt/build
ENV PATH=/opt/build/bin:$PATH
WORKDIR /app
COPY constraints-cuda12.txt ./
RUN pip install --no-cache-dir -c constraints-cuda12.txt torch "setuptools>=77" build
COPY . ./
RUN python -m build --no-isolation --wheel && python -m zipfile -e dist/*.whl dist/wheel

FROM ubuntu:24.04
# torch brings the CUDA libraries; torch.compile needs a compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
ARG CUDA=12
ARG CONSTRAINTS=constraints-cuda12.txt
ARG EXTRAS=train,rapids-cu${CUDA},tensorboard,sweep
COPY constraints.txt constraints-cuda12.txt ./
RUN pip install --no-cache-dir -c ${CONSTRAINTS} torch torchvision
COPY . ./
RUN pip install --no-cache-dir -c ${CONSTRAINTS} -e ".[${EXTRAS}]"
COPY --from=wheel /app/dist/wheel/pointproj/ops/backends/native/built pointproj/ops/backends/native/built
# Whoever runs it (--user) may write here.
RUN install --directory --mode=1777 /app/data /app/outputs /cache
ARG COMMIT=unknown
ENV TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    HOME=/cache \
    USER=pointproj \
    POINTPROJ_COMMIT=$COMMIT \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME ["/app/data", "/app/outputs", "/cache"]
USER 1000:1000
HEALTHCHECK --interval=30m --timeout=3m --start-period=3m CMD ["python", "-m", "pointproj", "doctor", "backend=auto"]
ENTRYPOINT ["python", "train.py"]
