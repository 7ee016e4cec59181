#!/bin/sh
# Writes the gRPC stubs beside their .proto files, and the client's; with --check, only says whether
# they are fresh.
set -eu
cd "$(dirname "$0")"

client=../client/quire_client

# Into the folders $1 and $2. The client's messages are in a descriptor pool of their own, so that it
# can be imported beside a `quire` of another version.
generate() {
  python -m grpc_tools.protoc -I . --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" \
    --mypy_grpc_out=quiet:"$1" quire/v1/*.proto
  mkdir -p "$2"
  sed -e 's/_descriptor_pool\.Default()/_descriptor_pool.DescriptorPool()/' \
    -e "s/'quire\.v1\.inference_pb2'/'quire_client.inference_pb2'/" \
    "$1/quire/v1/inference_pb2.py" >"$2/inference_pb2.py"
  cp "$1/quire/v1/inference_pb2.pyi" "$2"
}

if [ "${1:-}" != "--check" ]; then
  generate . "$client"
  exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh" "$fresh/client"
check() {
  for stub in "$1"/*; do
    cmp -s "$stub" "$2/$(basename "$stub")" ||
      { echo "stale: proto/$2/$(basename "$stub"); run make stubs" >&2; exit 1; }
  done
}
check "$fresh/quire/v1" quire/v1
check "$fresh/client" "$client"
