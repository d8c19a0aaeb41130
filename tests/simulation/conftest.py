"""`--all-layouts` checks every layout; without it a sample is checked."""


def pytest_addoption(parser):
    parser.addoption(
        "--all-layouts",
        action="store_true",
        help="check the order of communication of every layout",
    )
