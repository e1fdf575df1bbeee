"""What the tests of all packages share: the zoo of good and bad ops, fixtures, programs in processes of their own."""
