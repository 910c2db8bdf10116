"""`bayesadam play`: a page on this machine where data are clicked onto a plane and five methods' bands follow."""
