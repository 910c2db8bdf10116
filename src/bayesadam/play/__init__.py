"""`bayesadam play`: a page on this machine where data are clicked onto a plane and seven methods' bands follow."""
