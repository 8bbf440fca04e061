"""The reader of Nsight Compute's raw page: launches, units, and the line a kernel."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import profile_kernels as profile

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
PAGE = f"""==PROF== Connected to process 12
"ID","Kernel Name","Grid Size","gpu__time_duration.sum","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","{STALL.format("wait")}","{STALL.format("barrier")}"
"","","","msecond","%","inst","inst"
"0","void dm::sm90::dq_kernel<128, 0>(DqParams, int)","(8192, 1, 1)","7.5","52.25","1.5","2.5"
"1","void dm::sm90::dkv_kernel<128, 1, 1, 0>(DkvParams, int)","(1024, 1, 1)","8,900.1","60","n/a","0.5"
"""


def test_a_launch_is_a_line_with_its_time_in_microseconds_and_what_its_warps_wait_for():
    first, second = profile.summarise(profile.parse(PAGE))
    assert first["kernel"].startswith("void dm::sm90::dq_kernel")
    assert first["us"] == 7500.0
    assert first["tensor %"] == 52.25
    assert list(first["waits"]) == ["barrier", "wait"]
    assert second["us"] == 8900100.0  # a thousands separator is not a decimal point
    assert second["waits"] == {"barrier": 0.5}


def test_a_counter_that_ncu_does_not_know_is_none_not_zero():
    assert profile.summarise(profile.parse(PAGE))[0]["dram %"] is None


def test_no_page_is_no_launch():
    assert profile.parse("==ERROR== no permission") == []
