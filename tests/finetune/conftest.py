"""`--all-models` trains every kind of model of transformers under every layout; without it a sample
runs.
"""


def pytest_addoption(parser):
    parser.addoption(
        "--all-models",
        action="store_true",
        help="train every model of transformers under every layout",
    )
