"""Records and plans as tables for the terminal and as JSON."""

from halfstep.report.assignment import assignment_table
from halfstep.report.bench import bench_table
from halfstep.report.json import bench_json, read_bench
from halfstep.report.levels import level_table
from halfstep.report.ops import op_lines, op_table

__all__ = ["assignment_table", "bench_json", "bench_table", "level_table", "op_lines", "op_table", "read_bench"]
