"""`bayesadam play`: a page on this machine where data are clicked onto a plane and six methods' bands follow."""
