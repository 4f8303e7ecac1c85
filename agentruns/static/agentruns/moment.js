// The slider of a run's rows: it moves the number beside it, and goes there when it is let go.
// Without this the number and the button do the same.

const range = document.getElementById("ar-range");
const number = document.getElementById("ar-seq");

range.disabled = false;
range.addEventListener("input", () => {
  number.value = range.value;
});
range.addEventListener("change", () => {
  range.form.requestSubmit();
});
number.addEventListener("input", () => {
  range.value = number.value;
});
