"""Audit the ops of a package that declares none: ``shiplap audit --installed PACKAGE``."""
