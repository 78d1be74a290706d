"""The tests with many cases that take long, of which a run draws some by the commit's hash."""

import hashlib
import subprocess
from pathlib import Path

# Of these one n-th of the cases is run, all of them with -m "slow or not slow".
SAMPLED = {
    (
        "analysis/test_study_diff.py",
        "test_an_unchanged_kernel_on_a_machine_of_another_speed_is_no_change",
    ): 3,
    (
        "engine/attention/test_attention_half_precision.py",
        "test_kernels_equal_the_oracle_on_the_rounded_pools",
    ): 3,
    (
        "engine/attention/test_attention_half_precision.py",
        "test_resolvers_threads_and_switches_do_not_change_a_bit",
    ): 3,
    (
        "engine/numpy_port/test_graph_runner.py",
        "test_a_replayed_step_has_the_bits_of_the_forward",
    ): 3,
    (
        "engine/parallel/test_parallel_failures.py",
        "test_a_failing_rank_ends_the_step_and_all_ranks",
    ): 2,
    ("engine/test_architectures.py", "test_tokens_on_mlx_are_plain_mlx_lm_s"): 4,
    ("engine/test_compute_dtype.py", "test_a_layout_in_one_piece_holds_half_of_the_bytes"): 4,
    ("experiment/test_kernel_ablations.py", "test_every_claim_holds"): 3,
    ("experiment/test_layout_ablations.py", "test_every_claim_holds"): 3,
    (
        "experiment/test_live_studies.py",
        "test_arms_that_cannot_share_a_process_are_compared_round_by_round",
    ): 3,
    ("server/test_prompt_encoding.py", "test_special_tokens_in_content"): 3,
    ("test_experiments.py", "test_every_arm_composes_at_every_scale"): 3,
    ("test_experiments.py", "test_it_runs_tiny"): 2,
    ("test_job_launcher.py", "test_a_missing_extra_is_named_and_no_file_written"): 3,
    ("test_post.py", "test_committed_articles_agree_with_their_records"): 5,
    ("test_published.py", "test_every_published_row_of_an_ablation_meets_a_case_and_a_metric"): 4,
    (
        "test_published.py",
        "test_every_published_row_of_an_experiment_meets_a_case_and_a_metric",
    ): 4,
    (
        "test_published_tables.py",
        "test_a_study_publishes_each_number_of_the_tables_in_its_place",
    ): 4,
    ("test_recipes.py", "test_a_study_s_command_composes"): 4,
    (
        "workload/test_in_process_rules.py",
        "test_interleaved_arms_have_the_outputs_and_counters_of_arms_served_alone",
    ): 2,
}


def commit() -> str:
    """Return the hash of the checkout's commit, or "" outside of a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def draw(names: list[str], one_in: int, seed: str) -> set[str]:
    """Return one name in ``one_in`` of ``names``, at least one, drawn by ``seed``."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return set(ranked[: -(-len(names) // one_in)])
