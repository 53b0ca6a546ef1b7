"""What parts of spmdctx ask of jaxprs, and write into them."""
