# The image that the chart runs, gateways and groups alike: docker build -t quire .
# TORCH_INDEX is where torch comes from, PyPI and so CUDA where it is empty; PyTorch's own index of
# CPU builds makes an image that is several gigabytes smaller.
FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/quire \
    && pip install --no-cache-dir uv
COPY requirements.lock /src/
RUN /opt/quire/bin/pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--index-url $TORCH_INDEX} \
    $(grep -o '^torch==[0-9.]*' /src/requirements.lock)
COPY . /src
# With the CPU kernels compiled, for any x86-64 node.
RUN QUIRE_BUILD_NATIVE=1 uv pip install --no-cache --python /opt/quire/bin/python \
    --constraints /src/requirements.lock --build-constraints /src/requirements.lock \
    '/src[cluster,otel,vllm-grpc]'

FROM python:3.11-slim-bookworm
# Ray's start script wants bash and ps; Triton, on a node with a GPU, a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends bash g++ procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
CMD ["quire", "serve", "--host", "0.0.0.0"]
