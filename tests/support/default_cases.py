"""Cases of parametrised tests that run by default, where all of them would repeat each other.

The other cases of these tests are marked slow. Cases stay here that differ in the code they reach:
a sampler's own law, each estimator and minibatch scheme once, models with operations of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

DEFAULT_CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "compiling/test_negative_binomial.py": {
        "test_negative_binomial_keeps_values_and_gradients": (
            "one mean-True",
            "means of zero-True",
            "dispersion-False",
        )
    },
    "compiling/test_numba_loop.py": {
        "test_a_table_of_gradients": ("sampler0-shuffle",),
        "test_every_model": ("two_observed", "byte_outcome"),
        "test_every_sampler": ("SGHMC-shuffle", "OSGFS-replace"),
        "test_full_gradients": ("MALA",),
        "test_single_precision_and_preconditioners": ("curvature",),
        "test_sums_over_one_axis": ("1-bool", "3-float32"),
        "test_whole_numbers_and_truth_values": ("bool", "uint8", "int64"),
    },
    "compiling/test_numba_products.py": {"test_products_of_all_layouts": ("float64",)},
    "gradient_estimators/test_gradients.py": {
        "test_covariance_over_all_minibatches_is_the_formula": (
            "one variable-shuffle-plain",
            "one variable-shuffle-cv",
            "one variable-shuffle-second_order",
            "one variable-shuffle-svrg",
            "one variable-shuffle-saga",
            "one variable-replace-plain",
            "one variable-replace-cv",
            "one variable-replace-second_order",
            "one variable-replace-svrg",
            "one variable-replace-saga",
            "two forms-shuffle-saga",
            "two forms-replace-second_order",
            "one form-replace-saga",
        ),
        "test_mean_over_all_draws_with_replacement_is_the_full_gradient": (
            "one variable-plain",
            "one variable-cv",
            "one variable-second_order",
            "one variable-svrg",
            "one variable-saga",
            "two forms-second_order",
            "one form-saga",
        ),
    },
    "gradient_estimators/test_saga.py": {"test_the_table_is_changed_in_place": ("replace-NUMBA",)},
    "gradient_estimators/test_svrg.py": {
        "test_an_estimator_of_the_user_gives_the_same_draws_as_its_name": ("svrg",),
        "test_computed_step_size_keeps_the_stated_inflation": ("25-shuffle", "50-replace"),
    },
    "machines/test_consensus.py": {
        "test_log_densities_of_shards_add_up_to_that_of_the_model": (
            "simplex_model-None",
            "two_tables_model-large",
        )
    },
    "marginal/test_density.py": {
        "test_gradients": ("1-gamma frailty", "1-linear", "25-logistic slopes", "25-two variables"),
        "test_many_nodes_give_the_integral": ("logistic, unequal groups", "two outcomes"),
    },
    "marginal/test_interpolation.py": {
        "test_the_distribution_function_is_right_to_a_ten_thousandth": ("0.15",)
    },
    "marginal/test_marginalize.py": {
        "test_cells_of_two_codes_are_groups": ("non-centred", "gamma"),
        "test_groups_without_records_integrate_to_one": ("linear", "non_centred", "frailty"),
        "test_inexact_quadrature_is_told": ("two modes", "normal", "two quantities"),
        "test_quantities_of_groups_that_are_not_local": (
            "another_effect_of_groups",
            "as_many_predictors_as_groups",
        ),
    },
    "marginal/test_recover.py": {
        "test_linear_mixed_model_has_its_gaussian_law": ("False",),
        "test_logistic_intercepts_have_the_law_of_numerical_integration": ("True-6.0",),
        "test_other_priors_have_the_law_of_numerical_integration": ("Student-t",),
    },
    "maximum_likelihood/test_factors.py": {
        "test_nested_factors_of_a_linear_model": ("sum-True", "hierarchical-False")
    },
    "maximum_likelihood/test_fit.py": {
        "test_a_level_that_is_rare_in_the_sample": ("1",),
        "test_a_search_on_a_sample_ends_at_the_maximum_of_all_groups": ("linear",),
        "test_a_standard_deviation_of_zero_is_said": ("False-True", "True-False"),
        "test_the_gradient_is_that_of_the_value": (
            "logistic_intercepts-1",
            "logistic_intercepts-3",
            "gamma_frailty-3",
        ),
    },
    "papers/test_recipe.py": {
        "test_default_step_size": ("thermostat",),
        "test_noise_that_is_subtracted": ("sghmc-True",),
        "test_sghmc_law": ("cv",),
        "test_sgld": ("dense",),
        "test_without_gamma_they_do_not": ("thermostat",),
    },
    "papers/test_sgrld.py": {
        "test_small_steps_leave_the_posterior_invariant": ("1",),
        "test_without_gamma_they_do_not": ("1",),
    },
    "polishing/test_comparison.py": {
        "test_right_runs_are_rarely_beyond_doubt": ("0.95-200", "0.9-40")
    },
    "posterior/test_bad_rows.py": {
        "test_a_code_out_of_range": (
            "20-0-small data-settings0",
            "23-333-small data-settings1",
            "-21-399-large data-settings0",
            "-1-5-large data-settings1",
        )
    },
    "posterior/test_pooled_rows.py": {
        "test_bad_records_are_told_by_their_variable_and_number": (
            "one form-16",
            "two forms-0",
            "two forms-8",
        )
    },
    "posterior/test_posterior.py": {
        "test_agrees_with_the_model": (
            "ordinary-logistic",
            "ordinary-negative_binomial",
            "ordinary-categorical",
            "ordinary-two_observed",
            "ordinary-simplex",
            "ordinary-ordered_cutpoints",
            "ordinary-three_axes",
            "ordinary-predicts_itself",
            "ordinary-indexed_matrix",
            "ordinary-mixture",
            "ordinary-censored",
            "minibatch-hierarchical_non_centred",
            "minibatch-two_observed",
            "minibatch-narrow_types",
        ),
        "test_both_ways_are_the_same": (
            "logistic",
            "categorical",
            "hierarchical_non_centred",
            "two_observed",
            "zero_sum",
            "three_axes",
            "narrow_types",
        ),
        "test_data_variables_are_the_same_as_constants": (
            "linear",
            "multinomial",
            "two_observed",
            "stacked_columns",
            "narrow_types",
        ),
        "test_prior_and_rows_of_several_positions_at_once": (
            "negative_binomial",
            "categorical",
            "multinomial",
            "hierarchical_non_centred",
            "two_observed",
            "simplex",
            "lkj_covariance",
            "zero_sum",
            "zero_inflated",
            "mixture",
            "censored",
        ),
        "test_kinds_of_sources": ("persisted",),
        "test_rows_in_memory": ("SGLDCV",),
        "test_rows_in_stretches": ("1 kB",),
        "test_rows_of_a_source": ("SGLD",),
    },
    "sampling/test_groups.py": {
        "test_warnings_of_the_joint_model_are_given_where_it_is_sampled": ("auto",)
    },
    "sampling/test_sample.py": {
        "test_draws_of_estimators_and_schedules": ("computed",),
        "test_draws_of_every_sampler": ("SGLD", "SGHMC"),
        "test_tuning_is_kept_where_asked_for": ("25",),
    },
    "sampling/test_store.py": {
        "test_a_full_disk": ("0-1", "6000-2", "600000-1"),
        "test_an_end_at_any_write": ("2-middle", "3-middle", "4-before", "18-after", "29-middle"),
        "test_damaged_files_are_found": ("damage--1-state", "unlink--1-commit", "<lambda>-1-block"),
        "test_every_sampler_goes_on_bitwise": ("SGHMC",),
        "test_other_runs_are_refused": (
            "changed_prior-settings0-variable `beta` has another definition[^;]*$",
            "changed_data-settings1-data `y(, array \\\\d)?` is another one",
            "None-settings6-setting `random_seed` is another one[^;]*$",
            "None-settings7-initial values `chain 0` is another one",
            "None-settings9-`step_size` is 0.002 in place of 0.001",
            "None-settings12-has 25 draws already, more than `draws=10`",
        ),
    },
    "step_methods/test_full_gradient.py": {
        "test_acceptance_probability_and_decision": ("diagonal",),
        "test_covariance_of_mala": ("5",),
        "test_law_of_ula": ("5",),
    },
    "step_methods/test_hamcmc.py": {
        "test_compiled_chain_is_the_numpy_chain": ("3-between-plain",),
        "test_draws_do_not_depend_on_the_length_of_runs": ("4",),
        "test_law_without_pairs_is_that_of_sgld": ("2-cv",),
    },
    "step_methods/test_mirror.py": {"test_several_variables_that_depend_on_each_other": ("SGLD",)},
    "step_methods/test_non_gaussian.py": {"test_moments": ("SGLD-Student t",)},
    "step_methods/test_osgfs.py": {
        "test_adaptive_chains_have_the_posterior": ("center-center-cv", "model-fisher-plain"),
        "test_compiled_transitions_have_their_law": ("replace-cv",),
        "test_what_the_step_learns_from_all_rows_gives_the_posterior": (
            "shuffle-0.05-weak",
            "replace-0.25-mixed",
            "shuffle-0.5-strong",
        ),
    },
    "step_methods/test_psgld.py": {
        "test_computed_step_size_inflates_variances_by_five_percent": ("plain",)
    },
    "step_methods/test_repeat.py": {
        "test_every_setting_but_the_step_size": (
            "control variates",
            "rows in each transition",
            "replacement",
            "svrg",
        )
    },
    "step_methods/test_samplers.py": {
        "test_all_rows_are_the_full_gradient": ("SGLD-plain", "SGLD-cv", "SGLD-svrg", "SGLD-saga"),
        "test_law_with_an_exact_gradient": ("SGLD-5",),
        "test_law_with_minibatches": (
            "shuffle-12-4-weak prior-SGLD-plain",
            "shuffle-12-4-weak prior-SGLD-cv",
            "shuffle-12-4-weak prior-SGLD-svrg",
            "shuffle-12-4-weak prior-PSGLD-cv",
            "shuffle-12-4-weak prior-SGHMC-cv",
            "shuffle-12-4-weak prior-OSGFS-cv",
            "replace-6-2-weak prior-SGLD-plain",
        ),
        "test_order_of_the_bias": ("SGLD",),
        "test_order_of_the_rows_does_not_matter": (
            "SGLD-plain",
            "SGLD-cv",
            "SGLD-svrg",
            "SGLD-saga",
        ),
        "test_single_precision": ("SGHMC",),
    },
    "step_methods/test_sghmc.py": {
        "test_default_step_with_the_estimate": ("replace-baoab", "shuffle-euler"),
        "test_default_step_without_an_estimate_has_the_requested_inflation": (
            "shuffle-baoab",
            "replace-euler",
        ),
        "test_exact_gradient": ("5-baoab", "5-euler"),
        "test_friction_too_small_for_the_noise": ("baoab",),
        "test_minibatches": ("cv-replace-baoab",),
        "test_preconditioner_and_noise_estimate": ("scalar-scalar-euler", "dense-dense-baoab"),
        "test_steps_that_change_and_fresh_momenta": ("None-euler", "draw-euler"),
    },
    "step_methods/test_sgld.py": {"test_a_centre_of_the_user": ("names", "value names")},
    "step_methods/test_sgnht.py": {
        "test_frozen_thermostat_with_exact_gradient_leaves_the_posterior_invariant": ("5-scalar",),
        "test_frozen_thermostat_with_minibatches_is_baoab": ("dense-diagonal",),
        "test_transitions_are_those_of_the_formulas": ("diagonal",),
        "test_variance_of_a_standard_normal_in_fifty_dimensions": ("scalar",),
    },
    "step_methods/test_stationary_law.py": {
        "test_mean_and_covariance_equal_the_exact_biased_law": (
            "shuffle-cv-euler",
            "shuffle-plain-averaged",
        )
    },
    "step_methods/test_step_contract.py": {
        "test_backends_give_the_same_draws": ("FAST_COMPILE-shuffle",)
    },
    "test_chain.py": {"test_nothing_keeps_the_memory_of_a_run": ("PSGLD", "SGHMC")},
    "test_docs.py": {
        "test_code_runs": ("README.md", "docs/getting_started.md", "docs/trace_tools.md")
    },
    "test_gathering.py": {
        "test_draws_are_those_of_rows_in_memory": ("SGLDCV",),
        "test_draws_so_far_are_kept_where_rows_are_lost": ("error0",),
    },
    "test_main.py": {"test_failed_write_is_one_line_and_the_rest_is_kept": ("disk",)},
    "test_matrices.py": {"test_no_kernels_accept_equal_coordinates": ("Haswell",)},
    "test_notebooks.py": {"test_notebook_runs": ("quickstart",)},
    "trace_tools/test_bias.py": {
        "test_error_is_that_of_the_exact_law": (
            "euler-8-identity",
            "euler-40-inverse",
            "averaged-8-diagonal",
            "averaged-40-identity",
        ),
        "test_report_of_other_samplers": ("OSGFS",),
        "test_size_of_the_mean_gradient_test": ("heavy tails",),
    },
    "trace_tools/test_calibration.py": {
        "test_refused_or_better": (
            "banana-0.5",
            "funnel-2.0",
            "student t, 5-0.5",
            "two modes-2.0",
            "flat top-0.5",
            "log gamma, 1-2.0",
            "quartic-0.5",
        ),
        "test_stated_errors_are_those_made": ("0.02",),
    },
    "trace_tools/test_moments.py": {
        "test_many_coordinates_have_products_of_all_transitions": ("120",)
    },
    "trace_tools/test_stated.py": {"test_shift_of_the_mean": ("1.0",)},
    "trace_tools/test_zero_variance.py": {"test_gain_is_that_predicted": ("0.2-0.5",)},
    "tuning/test_center_warnings.py": {
        "test_a_centre_that_is_a_guide": (
            "<lambda>",
            "counts_in_centred_groups",
            "known_variances",
        ),
        "test_a_centre_that_is_no_guide": ("groups", "modes"),
        "test_predicted_error_of_a_mean": ("20-1000", "150-600"),
    },
    "tuning/test_funnel.py": {
        "test_funnels_are_warned_of": ("student",),
        "test_ratio_is_that_of_the_exact_law": (
            "Effects(groups=8, records=300, scale=0.1)",
            "Effects(groups=30, records=20, scale=0.3)",
        ),
    },
    "tuning/test_gaussian.py": {"test_mean_field_divides_groups_among_its_points": ("300-2",)},
    "tuning/test_row_noise.py": {"test_law_with_kept_rows": ("SGLDCV-JAX",)},
    "tuning/test_sparse_curvature.py": {
        "test_matrix_is_the_hessian": (
            "model-non-centred",
            "model-matches",
            "model-cells",
            "own coordinates-centred",
            "own coordinates-non-centred",
            "own coordinates-others",
        )
    },
}
"""Files, tests and their cases."""


def _cases_of(test: str) -> tuple[str, ...] | None:
    file, _, name = test.partition("::")
    return DEFAULT_CASES.get(file, {}).get(name)


def leave_out_the_others(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that are not listed as slow.

    Raises
    ------
    pytest.UsageError
        Where a listed case of a collected test does not exist.
    """
    seen: dict[str, set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        listed = _cases_of(test)
        if listed is not None and case:
            seen.setdefault(test, set()).add(case[:-1])
            if case[:-1] not in listed:
                item.add_marker(pytest.mark.slow)
    for test, cases in seen.items():
        listed = _cases_of(test) or ()
        missing = set(listed) - cases
        # Where few were collected they were asked for by their names.
        if missing and len(cases) > len(listed):
            raise pytest.UsageError(f"{test} has no cases {sorted(missing)} (default_cases.py)")


FAST = (
    "adaptation/",
    "datasets/",
    "gradient_estimators/test_saga.py::test_recursion_on_stored_positions",
    "gradient_estimators/test_svrg.py::test_closed_form_law",
    "marginal/test_interpolation.py",
    "marginal/test_inversion.py",
    "marginal/test_structure.py",
    "polishing/test_comparison.py",
    "polishing/test_report.py",
    "posterior/test_position.py",
    "posterior/test_possible.py",
    "sampling/test_encode.py",
    "sources/test_arrays.py",
    "sources/test_group_index.py",
    "sources/test_transform.py",
    "step_methods/test_sampler_contract.py::test_recorded_gradient",
    "step_methods/test_signatures.py",
    "step_methods/test_stationary_law.py",
    "test_engine.py",
    "test_imports.py",
    "test_limits.py",
    "test_low_rank.py",
    "test_matrices.py",
    "compiling/test_noise.py",
    "test_references.py",
    "test_release.py",
    "test_spelling.py",
    "test_stein.py",
    "trace_tools/test_convergence.py",
    "trace_tools/test_divergence.py",
    "trace_tools/test_kernel_stein.py",
    "trace_tools/test_predictive_density.py",
    "trace_tools/test_summary.py",
    "tuning/test_curvature.py",
)
"""Beginnings of the names of tests that `-m fast` runs: some of every room."""


def mark_fast(items: Iterable[pytest.Item]) -> None:
    """Mark the tests for a first look, among those that are not slow."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(FAST) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)
