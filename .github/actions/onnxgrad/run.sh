#!/usr/bin/env bash
# Runs onnxgrad as action.yml asks: $COMMAND on the files of $MODELS with $ARGUMENTS. The step ends with its exit code.
# shellcheck disable=SC2153 # action.yml gives MODELS and ARGUMENTS
set -uo pipefail
shopt -s globstar nullglob

read -r -d '' -a patterns <<<"$MODELS"
read -r -d '' -a arguments <<<"$ARGUMENTS"
models=()
for pattern in "${patterns[@]}"; do
  # shellcheck disable=SC2206 # it is to be expanded
  IFS='' found=($pattern) # a glob may match names with blanks
  if [[ -e $pattern ]]; then found=("$pattern"); fi
  if [[ ${#found[@]} -eq 0 ]]; then
    echo "::error title=onnxgrad::no file is called as the input models says"
    exit 2
  fi
  models+=("${found[@]}")
done

json="${RUNNER_TEMP:-/tmp}/onnxgrad.json"
onnxgrad "$COMMAND" ${arguments[@]+"${arguments[@]}"} --json -- "${models[@]}" >"$json"
code=$?
{
  echo "exit-code=$code"
  echo "json=$json"
} >>"$GITHUB_OUTPUT"
exit "$code"
