#!/bin/sh
# Writes the gRPC stubs beside their .proto files; with --check, only says whether they are fresh.
set -eu
cd "$(dirname "$0")"

generate() {
  python -m grpc_tools.protoc -I . --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" \
    --mypy_grpc_out=quiet:"$1" quire/v1/*.proto
}

if [ "${1:-}" != "--check" ]; then
  generate .
  exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
for stub in "$fresh"/quire/v1/*; do
  cmp -s "$stub" "quire/v1/$(basename "$stub")" ||
    { echo "stale: proto/quire/v1/$(basename "$stub"); run make stubs" >&2; exit 1; }
done
