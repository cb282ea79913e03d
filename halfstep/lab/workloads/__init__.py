"""Small real training jobs by name: char_lm, cifar_resnet, imdb_lstm, regression."""

from halfstep.lab.workloads.load import WORKLOADS, load_workload, parse_settings
from halfstep.lab.workloads.workload import Batch, Workload

__all__ = ["WORKLOADS", "Batch", "Workload", "load_workload", "parse_settings"]
