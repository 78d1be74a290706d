"""The tests with many cases that take long."""

# Of these every n-th case is run, all of them with -m "slow or not slow".
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
    ): 3,
    (
        "engine/test_architectures.py",
        "test_tokens_of_others_in_a_class_are_plain_mlx_lm_s",
    ): 8,
    ("experiment/test_kernel_ablations.py", "test_every_claim_holds"): 3,
    ("experiment/test_layout_ablations.py", "test_every_claim_holds"): 3,
    ("experiment/test_live_studies.py", "test_a_failing_arm_fails_alone"): 3,
    ("server/test_prompt_encoding.py", "test_special_tokens_in_content"): 3,
    ("test_experiments.py", "test_every_arm_composes_at_every_scale"): 3,
    ("test_recipes.py", "test_a_study_s_command_composes"): 4,
    (
        "workload/test_in_process_rules.py",
        "test_interleaved_arms_have_the_outputs_and_counters_of_arms_served_alone",
    ): 2,
}
