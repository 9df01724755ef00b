# PRISM on a machine with an NVIDIA GPU, with the versions of constraints.txt. docs/howto/gpu-and-mac.md says how to run it.
# NOT BUILT by its authors: the machine that it was written on has no GPU and no docker.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 MUJOCO_GL=egl PRISM_DATA=/prism/data/cache
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv libegl1 libgl1 libglib2.0-0 git \
 && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/prism
ENV PATH=/opt/prism/bin:$PATH

WORKDIR /opt/src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY packages packages
RUN pip install -c constraints.txt '.[sims,data,baselines,onnx,serve]' ./packages/prism-client ./packages/prism-sims

WORKDIR /prism
RUN useradd --create-home robot && mkdir -p /prism/runs /prism/data && chown -R robot /prism
USER robot
EXPOSE 8000
ENTRYPOINT ["prism"]
CMD ["--help"]
