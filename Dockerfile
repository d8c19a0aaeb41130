# The image that kubernetes/trainjob.yaml names:
#
#   docker build --tag armature:latest .
#   docker build --tag armature:latest --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .   # without GPUs
#   docker run --rm --gpus all --ipc host --volume "$PWD/outputs:/armature/outputs" armature:latest python train.py
#
# torch's wheels bring CUDA with them: the machine needs NVIDIA's driver and container toolkit only.
FROM python:3.12-slim-bookworm

# DeepSpeed and torch.compile build code while a run starts
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make ninja-build \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /armature
ARG TORCH_INDEX=https://pypi.org/simple
COPY constraints.txt requirements.txt ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch>' requirements.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".[deepspeed,wandb]"
ENV PYTHONUNBUFFERED=1
CMD ["python", "train.py", "experiment=example", "debug=fast"]
