"""Sandbox: the process of code that is not trusted, with its limits, its protocol and its clock."""
