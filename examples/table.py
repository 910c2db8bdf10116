"""A scikit-learn pipeline with grid search, and predictions with bands: `python examples/table.py`."""

from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesadam.sklearn import BadamRegressor

X, y = load_diabetes(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=0)

pipeline = make_pipeline(StandardScaler(), BadamRegressor(random_state=0))
search = GridSearchCV(pipeline, {"badamregressor__weight_decay": [1e-3, 1e-2, 1e-1]}, cv=2)
search.fit(X_train, y_train)
print("chosen:", {name.partition("__")[2]: value for name, value in search.best_params_.items()})
print(f"R² on test data {search.score(X_test, y_test):.3f}")

# GridSearchCV.predict takes no options; the pipeline it found does. As of a GaussianProcessRegressor, the standard
# deviation includes the noise.
mean, std = search.best_estimator_.predict(X_test, return_std=True)
inside = abs(y_test - mean) < 1.96 * std
print(f"95 % bands hold {inside.mean():.3f} of the test targets")
for i in range(3):
    print(f"patient {i}: {mean[i]:.0f} ± {1.96 * std[i]:.0f}, was {y_test[i]:.0f}")
