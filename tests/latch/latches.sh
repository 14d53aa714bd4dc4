# Runs latch with the words of each argument. Prints its exit status, its output, and its errors
# after `! `, but not where to read more.
for words; do
    said=$(echo | eval "latch $words" 2> .said.$$)
    printf '%s\n' "$?${said:+ $said}$(sed '/^latch: see latch .*--help$/d; s/^/ ! /' .said.$$)"
done
rm .said.$$
