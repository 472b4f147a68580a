#!/usr/bin/env bash
# Make an environment with released packages, torch and this checkout of lt_tiled, and run the comparison in it.
#
#     bash benchmarks/projects/environment.sh DIRECTORY [PACKAGE ...] [--write]
#
# The directory should be outside of the repository. An index with torch for the CPU saves 5 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
directory=$(realpath -m "${1:?"the directory of the environment, which should be outside of the repository"}")
[ -e "$directory/bin/pip" ] || python3 -m venv "$directory"
install=("$directory/bin/pip" install -q -c "$root/constraints.txt")

"${install[@]}" torch -e "$root" pytorch-lightning transformers
# lightly-train comes last: litgpt pins an older huggingface-hub than transformers needs, which its model does not import.
for package in timm torchvision segmentation-models-pytorch neuralforecast 'gluonts[torch]' litgpt lightly-train; do
    "${install[@]}" "$package" || echo "not installed: $package" >&2
done
# boltz pins pytorch-lightning 2.5.0 and numpy below 2, among others: install it without them, and what its model imports.
"${install[@]}" --no-deps boltz==2.2.1 || echo "not installed: boltz" >&2
"${install[@]}" dm-tree einops einx fairscale gemmi hydra-core mashumaro modelcif numba rdkit scikit-learn wandb

cd "$root"
"$directory/bin/python" -m benchmarks.projects "${@:2}"
