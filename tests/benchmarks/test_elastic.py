"""The figures of benchmarks: what a row says of the values it is made of."""

from benchmarks.elastic import figure


def test_the_99th_percentile_is_the_nearest_rank_and_of_few_values_the_largest():
    assert figure("f", [3.0, 1.0, 2.0])["p99"] == 3.0
    assert figure("f", [7.0])["p99"] == 7.0
    assert figure("f", [float(i) for i in range(1, 101)])["p99"] == 99.0
    assert figure("f", [float(i) for i in range(1, 202)])["p99"] == 199.0
