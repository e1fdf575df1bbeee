"""The sandbox: a process for code that is not trusted, with its limits, its protocol and its clock."""
