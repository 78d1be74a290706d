"""The tests with many cases that take long, of which a run draws some by the commit's hash."""

import hashlib
import subprocess
from pathlib import Path

# Of these one n-th of the cases is run, all of them with -m "slow or not slow".
SAMPLED = {
    (
        "analysis/statistics/test_best_arm.py",
        "test_intervals_and_sets_cover_in_simulated_studies",
    ): 3,
    (
        "analysis/statistics/test_error_rates.py",
        "test_equal_studies_are_rarely_called_different",
    ): 2,
    (
        "analysis/robustness/test_cells_by_host.py",
        "test_relabelling_within_blocks_keeps_its_level_and_power_over_hosts",
    ): 2,
    (
        "analysis/comparison/test_interleaved_rates.py",
        "test_interleaved_studies_estimate_without_bias_and_keep_their_error_rates",
    ): 3,
    (
        "analysis/comparison/test_interleaved_rates.py",
        "test_live_studies_of_nothing_seldom_find_something",
    ): 2,
    (
        "analysis/comparison/test_machine_or_arm_stalls.py",
        "test_equal_arms_with_stalls_are_called_different_in_at_most_6_percent",
    ): 4,
    (
        "analysis/comparison/test_observations.py",
        "test_interleaved_arms_without_an_effect_seldom_differ",
    ): 4,
    (
        "analysis/studies/test_between_study_comparison.py",
        "test_an_unchanged_kernel_on_a_machine_of_another_speed_is_no_change",
    ): 3,
    (
        "analysis/comparison/test_perplexity_and_kl.py",
        "test_intervals_of_dependent_windows_cover_the_truth",
    ): 2,
    (
        "analysis/comparison/test_verdict_rates.py",
        "test_a_forecast_from_noise_of_five_processes_has_its_power",
    ): 3,
    (
        "analysis/comparison/test_verdict_rates.py",
        "test_arms_that_differ_by_the_margin_are_seldom_called_equivalent",
    ): 3,
    (
        "analysis/comparison/test_verdict_rates.py",
        "test_the_printed_figure_has_its_power_with_few_blocks",
    ): 3,
    ("cpu/test_int8_matmul.py", "test_other_cpus_forms_have_the_same_bits"): 4,
    ("cpu/test_register_tile_sizes.py", "test_every_intrinsic_compiles_for_another_cpu"): 3,
    ("cpu/test_register_tile_sizes.py", "test_integer_products_compile_for_another_cpu"): 4,
    ("docs/test_recompute_statistics.py", "test_the_script_gives_the_package_s_numbers"): 4,
    ("docs/test_widget_functions.py", "test_both_languages_agree"): 3,
    (
        "engine/attention/test_attention_half_precision.py",
        "test_kernels_equal_the_oracle_on_the_rounded_pools",
    ): 3,
    (
        "engine/attention/test_attention_half_precision.py",
        "test_resolvers_threads_and_switches_do_not_change_a_bit",
    ): 3,
    (
        "engine/numpy_port/test_kernel_graph_replay.py",
        "test_a_replayed_step_has_the_bits_of_the_forward",
    ): 3,
    (
        "engine/parallel/test_parallel_failures.py",
        "test_a_failing_rank_ends_the_step_and_all_ranks",
    ): 3,
    (
        "engine/model/test_architectures.py",
        "test_tokens_of_others_in_a_class_are_plain_mlx_lm_s",
    ): 8,
    ("engine/test_paged_tokens.py", "test_greedy_tokens_equal_plain_mlx_lm"): 2,
    ("engine/test_sweep.py", "test_every_pair_of_choices"): 3,
    (
        "engine/kv_layout/test_window_pools.py",
        "test_random_requests_aborts_and_preemptions_leak_nothing",
    ): 3,
    ("experiment/test_hydra_composer.py", "test_a_shared_tree_composes_what_hydra_composes"): 5,
    ("experiment/test_kernel_ablations.py", "test_every_claim_holds"): 3,
    ("experiment/test_layout_ablations.py", "test_every_claim_holds"): 3,
    (
        "experiment/test_live_studies.py",
        "test_arms_that_cannot_share_a_process_are_compared_round_by_round",
    ): 3,
    (
        "experiment/test_simulated_studies.py",
        "test_two_thousand_studies_of_nothing_seldom_find_something",
    ): 4,
    ("metal/test_kernel_call.py", "test_the_sources_compile_as_cuda"): 9,
    ("metal/test_metal_bugs.py", "test_bug_is_caught"): 3,
    ("metal/test_metal_mutants.py", "test_sampled_mutant_is_detected"): 3,
    ("server/test_prompt_encoding.py", "test_special_tokens_in_content"): 3,
    ("test_app.py", "test_an_error_is_one_line_with_exit_code_2_and_no_files"): 3,
    ("test_app.py", "test_flags_that_only_print_exit_with_0"): 2,
    ("test_docs.py", "test_a_mistake_in_an_ablation_is_one_line"): 3,
    ("test_docs.py", "test_the_tables_of_sensitivity_are_those_of_the_committed_records"): 3,
    ("test_experiments.py", "test_every_arm_composes_at_every_scale"): 6,
    ("test_experiments.py", "test_it_runs_tiny"): 4,
    ("test_job_launchers.py", "test_a_missing_extra_is_named_and_no_file_written"): 3,
    ("test_post.py", "test_committed_articles_agree_with_their_records"): 5,
    ("test_published.py", "test_every_published_row_of_an_ablation_meets_a_case_and_a_metric"): 4,
    ("test_published.py", "test_every_published_row_of_an_experiment_meets_a_case_and_a_metric"): 4,
    (
        "test_published_tables.py",
        "test_a_study_publishes_each_number_of_the_tables_in_its_place",
    ): 8,
    ("test_readme.py", "test_no_committed_archive_names_a_machine_path"): 4,
    ("test_recipes.py", "test_a_study_s_command_composes"): 12,
    (
        "workload/test_in_process_rules.py",
        "test_interleaved_arms_have_the_outputs_and_counters_of_arms_served_alone",
    ): 2,
    ("workload/video/test_frame_decoding.py", "test_every_way_gives_the_frames_of_a_list"): 3,
    (
        "workload/video/test_frame_selection.py",
        "test_keyframe_picks_of_all_clips_up_to_300_frames",
    ): 3,
    (
        "workload/video/test_interleaved_frame_decoding.py",
        "test_a_pick_moved_by_one_frame_is_found",
    ): 4,
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
