"""The table of the checks, as it is made of pytest's reports."""

from tests.conformance.versions import outcomes, table

REPORT = """<testsuites><testsuite>
<testcase name="test_c01_models"/><testcase name="test_c08_prompts"/>
<testcase name="test_c08_suffix"><failure message="no"/></testcase>
<testcase name="test_c45_bodies"><skipped/></testcase><testcase name="test_other"><error/></testcase>
</testsuite></testsuites>"""


def test_a_check_is_as_good_as_its_worst_test() -> None:
    assert outcomes(REPORT) == {"C01": "ok", "C08": "failed", "C45": "skipped"}


def test_the_table_has_a_row_for_each_check_and_a_column_for_each_version() -> None:
    told = table({"1": {"C01": "ok"}, "2": {"C01": "failed", "C02": "ok"}})
    assert told.splitlines()[2:] == ["| C01 | ok | failed |", "| C02 | - | ok |"]
