"""The C++ that generated projects compile, one directory a vendor."""
