"""What pyproject.toml cannot say: `model_card.md`, which lies at the top of the checkout, is part of the package."""

import os

from setuptools import setup
from setuptools.command.build_py import build_py

CARD = "model_card.md"


class BuildWithCard(build_py):
    def build_package_data(self):
        super().build_package_data()
        self.copy_file(CARD, os.path.join(self.build_lib, "modeling_xl", CARD))

    def get_source_files(self):
        return [*super().get_source_files(), CARD]


setup(cmdclass={"build_py": BuildWithCard})
