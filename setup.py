"""What pyproject.toml cannot say: configs/ and scripts/ are parts of the installed package."""

from setuptools import find_namespace_packages, setup


def packages(folder: str, inside: str = "") -> list[str]:
    found = find_namespace_packages(folder, exclude=["*__pycache__*", "*.egg-info"])
    return [f"{inside}{name}" for name in found]


setup(
    packages=[
        *packages("src"),
        "armature.configs",
        *packages("configs", "armature.configs."),
        "armature.scripts",
        *packages("scripts", "armature.scripts."),
    ],
    package_dir={"": "src", "armature.configs": "configs", "armature.scripts": "scripts"},
    package_data={
        "": ["*.yaml", "*.css", "*.gz", "*.sbatch", "*.sh"],
        "armature.configs": [".schema/*.json"],
        "armature.scripts.project": ["*", ".gitignore"],
    },
    exclude_package_data={"armature.configs.local": ["default.yaml"]},
)
