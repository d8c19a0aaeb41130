"""What pyproject.toml cannot say: configs/ and scripts/ are parts of the installed package."""

import sys

from setuptools import find_namespace_packages, setup

# An editable install finds them in the clone. With src/ alone it is a path instead of a finder:
# packages that are added later are on it, and a folder named armature, as of the clone, is not
# taken for the package
editable = "editable_wheel" in sys.argv
shipped = {} if editable else {"armature.configs": "configs", "armature.scripts": "scripts"}


def packages(folder: str, inside: str = "") -> list[str]:
    found = find_namespace_packages(folder, exclude=["*__pycache__*", "*.egg-info"])
    return [f"{inside}{name}" for name in found]


setup(
    packages=[
        *packages("src"),
        *shipped,
        *(part for name, folder in shipped.items() for part in packages(folder, f"{name}.")),
    ],
    package_dir={"": "src", **shipped},
    package_data={
        "": ["*.yaml", "*.css", "*.gz", "*.sbatch", "*.sh"],
        "armature.configs": [".schema/*.json"],
        "armature.scripts.project": ["*", ".gitignore"],
    },
    exclude_package_data={"armature.configs.local": ["default.yaml"]},
)
