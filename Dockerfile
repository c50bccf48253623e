# The package; its default command is the tiny run: make the scenes, train, ask.
#
#   CPU    docker build -t subtoken-train .
#   CUDA   docker build -t subtoken-train:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 \
#            --build-arg TORCH_INDEX= .
#            with --build-arg EXTRAS=[all] also what 4- and 8-bit backbones need (recipes/memory)
#   run    docker run --rm subtoken-train
#          docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/runs" subtoken-train:cuda \
#            subtoken-train fit --config RECIPE
#          (with --user, since the image's own user is 1000 and may not write into another's folder)
#
# BASE needs Python 3.11 or newer, or Debian's packages of it.
ARG BASE=python:3.12-slim

FROM python:3.12-slim AS build
COPY . /src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=[report,tensorboard]
# a compiler is what Triton builds its launchers with; a CPU needs none
# hadolint ignore=DL3008
RUN python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || { apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "$(echo /wheels/*.whl)${EXTRAS}"
ENV PATH=/opt/venv/bin:$PATH
RUN mkdir -m 1777 /runs
WORKDIR /runs
ENV HOME=/runs
USER 1000:1000
CMD ["sh", "-c", "{ test -d data/scenes || subtoken-train data scenes; } \
    && subtoken-train fit --config tiny_fastv25_s16k4 --overwrite \
    && subtoken-train generate --adapter runs/tiny_fastv25_s16k4 --image data/scenes/dev/000000.jpg --prompt 'is there a 7 ?'"]
