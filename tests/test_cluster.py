"""recipes/cluster.smk: what becomes a job, in which order, each once, two at a time."""

import subprocess
import sys

import pytest
from helpers import ROOT

from recipes.steps import load, remove

pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
