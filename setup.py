import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
(version,) = re.findall('__version__ = "(.+)"', (ROOT / "nn_parallel" / "_version.py").read_text())

setup(
    name="nn_parallel",
    version=version,
    description="Run PyTorch functions on every device and every rank, with an exception where others hang.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    # Said, though it is the default: `pip install -e` then puts this folder on the path. Else it installs an import
    # hook. Mypy does not know that, and it is asked too late where this folder, itself no package, is found by name.
    package_dir={"": "."},
    packages=find_packages(include=["nn_parallel", "nn_parallel.*"]),
    py_modules=["pytest_nn_parallel"],
    entry_points={
        "console_scripts": ["nn-parallel = nn_parallel.__main__:main"],
        "pytest11": ["nn_parallel = pytest_nn_parallel"],
    },
    package_data={"nn_parallel": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "cloudpickle>=3.0", "nvidia-ml-py>=12"],
    extras_require={
        "docs": ["mkdocs-material", "mkdocstrings[python]", "ruff"],
        "examples": ["matplotlib", "pyyaml", "scikit-learn", "tqdm"],
        "peers": ["joblib", "loky", "matplotlib", "ray", "torchrunx"],
        "ray": ["ray[client]>=2.40"],
        "test": [
            "build",
            "hypothesis",
            "ipykernel",
            "jupyter-client",
            "mypy",
            "numpy",
            "pytest",
            "pytest-timeout",
            "pyyaml",
            "ray[client]",
            "ruff",
            "scikit-learn",
            "setuptools>=70.1",
            "tqdm",
            "matplotlib",
            "twine",
        ],
    },
    license_files=["LICENSE"],
    keywords=[
        "pytorch",
        "torch.distributed",
        "ddp",
        "distributed training",
        "process pool",
        "gpu",
        "slurm",
        "torchrun",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Framework :: Pytest",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
